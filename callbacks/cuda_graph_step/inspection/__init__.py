"""What a step's Python code depends on and does on the host, told from its bytecode without running it."""
