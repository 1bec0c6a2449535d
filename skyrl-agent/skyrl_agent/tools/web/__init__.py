"""Reading web pages: addresses, what is blocked, pages to text, text to what a goal needs."""
