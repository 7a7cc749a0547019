"""Show search results of one model, interactively in the terminal, or of several models, side by side in the browser."""
