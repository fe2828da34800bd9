"""Step environments on the host: pools, and how compiled programs call them."""
