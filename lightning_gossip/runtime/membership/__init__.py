"""Who is in the job, who has failed, who joins, and the collectives that survive that."""
