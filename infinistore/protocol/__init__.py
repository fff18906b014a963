"""What is said on the wire: messages, frames, and which message may come next. No I/O."""
