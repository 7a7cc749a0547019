"""Looking at what retrievers find: one at a prompt, or several beside each other in a browser."""
