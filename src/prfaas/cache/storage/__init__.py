"""Where the bytes of cached blocks are: an arena of pages in memory, and a file on an SSD."""
