"""One study worked on by many processes: units of work in an Optuna storage, claimed, leased, retried, recorded once.

Refuses to know what a unit computes: an objective says that. Nothing here imports torch.
"""
