"""Show search results: of one model at a prompt in the terminal, or of several models side by side in the browser."""
