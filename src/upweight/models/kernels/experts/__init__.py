"""The experts of a layer as grouped products, with the passes over rows that lie between them."""
