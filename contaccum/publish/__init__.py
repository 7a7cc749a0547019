"""A trained model for others: its card, and the Hub."""
