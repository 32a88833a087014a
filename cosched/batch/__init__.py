"""Files and Batches of the OpenAI API, for one replica and for several.

The server: store, files, feeder, forecasts (4,200 lines). The client of a batch file, which works
with other servers too and resumes after any interruption: `jsonl/` (3,400).
"""
