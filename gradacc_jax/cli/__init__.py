"""The command `gradacc`. `import gradacc_jax` loads nothing of it."""
