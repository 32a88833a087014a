"""What a run was like, simulated or live: records, their summary, tables and pictures of them."""
