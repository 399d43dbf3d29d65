"""Networks side by side: what they cost here, measured in one run, and what the paper says of them."""
