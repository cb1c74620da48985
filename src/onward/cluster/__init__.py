"""Copies of a node. `replica` follows a running broker; consensus between nodes comes later."""
