"""What this machine has, what is broken, and what will therefore be used. Every probe is a small function.

What may crash or hang when it is loaded (torch, NIXL, ...) is loaded in a child process, under a deadline.
"""
