"""Links between simulated clusters, and how transfers share them."""
