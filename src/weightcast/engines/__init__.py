"""Engines that weightcast can put weights into."""
