"""Everything that touches Redis: keys, client, queue, frames, jobs, registry."""
