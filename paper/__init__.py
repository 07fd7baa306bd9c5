"""What only the paper's tables and figures need: analyses, drawing, runs, and the program that reproduces them."""
