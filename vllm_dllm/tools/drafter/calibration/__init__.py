"""Makes width predictors: measures block sizes on prompts and trains BlockPilot on them."""
