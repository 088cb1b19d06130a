"""Model families in plain torch, and the fallback that runs any other Hugging Face causal LM."""
