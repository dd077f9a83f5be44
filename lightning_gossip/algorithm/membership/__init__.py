"""Who is in the job, who has failed, who joins: protocols without a store, a thread or a clock (docs/design.md)."""
