"""Parts of a server that at times do what they seldom do, for simulations."""
