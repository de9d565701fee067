"""One Allocate, from the call to the booking: which pod is meant, which cards it gets, what is written down."""
