"""`ipc://`: versions in memory that is shared between the processes of one host. docs/protocol.md says what is exchanged."""
