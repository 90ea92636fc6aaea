"""Arrays and numbers to one self-contained HTML page: no network, no scripts or fonts from elsewhere."""
