"""Files and Batches of the OpenAI API, for one replica and for several."""
