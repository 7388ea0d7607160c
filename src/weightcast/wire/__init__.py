"""Every struct that leaves a process: data, no behaviour."""
