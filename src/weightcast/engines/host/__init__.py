"""The host copy: a version in the form of a checkpoint, kept once per host for engines that keep their weights packed."""
