"""The one decision maker: filter, gangs, preemption, bind and events over one state and one lock; no I/O."""
