"""Web page reading: URLs, blocklists, HTML to text, and summaries for a goal."""
