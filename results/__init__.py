"""What was measured: runs as data, and the pages generated from them."""
