"""Between the data type of a cache and that of the wire."""
