"""Block-diffusion drafters: small models that guess the next tokens of an autoregressive one."""
