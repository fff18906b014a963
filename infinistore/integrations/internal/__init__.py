"""What the adapters share. Not public: it may change without notice."""
