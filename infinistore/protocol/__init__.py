"""The wire protocol: messages, frames, and the order in which they may come. No I/O."""
