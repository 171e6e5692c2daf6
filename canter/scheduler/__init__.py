"""The scheduler: a pure state machine. Events and the time go in, plans and deltas come out; no torch, no clock, no I/O."""
