"""What only the paper's tables and figures need: runs, analyses, drawings, and its printed claims."""
