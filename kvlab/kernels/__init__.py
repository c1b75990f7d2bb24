"""F0: tensors in, tensors out. Knows no method, no config, no model.

Each file holds the slow float reference (the definition), the fast torch path, and the dispatcher with `impl=`.
"""
