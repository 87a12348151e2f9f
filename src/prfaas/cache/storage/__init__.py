"""The bytes of cached blocks: an arena of pages in memory, a file on an SSD, and both tiers."""
