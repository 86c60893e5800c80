# %% [markdown]
# # Triage of customer reviews
#
# Open this file as a notebook (VS Code, Spyder and Jupytext understand the `# %%` cells), or run it as it is:
# `python examples/notebook.py`. No account, no server: without `model=` the embedded SmolLM2-135M-Instruct answers, on
# the CPU. It is a small model; its answers are quick, and sometimes wrong.

# %%
from pathlib import Path

import pandas as pd

import batchrun as br

here = Path(__file__).parent
reviews = here / "reviews.parquet"
triage = {"template": str(here / "triage.j2"), "chat": "off", "stop": "###", "max_tokens": 24, "limit": 12}

# %% [markdown]
# The plan reads and tokenises everything before any weights are loaded: how long the prompts are, how much of them is
# shared, which rows cannot run.

# %%
output = Path("out") / "triage"
plan = br.plan(reviews, output=output, **triage)
print(f"{plan.summary.num_rows} rows, {plan.summary.prompt_tokens:,} prompt tokens")
print(f"{plan.summary.unique_prompt_tokens:,} of them are left when shared prefixes are computed once")

# %% [markdown]
# The run. Interrupt it and call it again: it goes on where it stopped. A complete job returns at once.

# %%
outcome = br.submit(reviews, output=output, **triage)
print(f"{outcome.rows} rows in {outcome.output}, errors: {outcome.errors or 'none'}")

# %%
answers = pd.read_parquet(outcome.output)
answers[["product", "stars", "review", "text"]]

# %% [markdown]
# Or without files: a DataFrame (or a Dataset, or an Arrow table) in, the same kind out.

# %%
questions = pd.DataFrame({"question": ["What is a capital city?", "Name a fruit.", "What do bees make?"]})
replies = br.generate(questions, prompt_col="question", max_tokens=16)
print(replies[["question", "text"]].to_string(index=False))
