from gradacc_jax.equivalence.loss import Question, check
