"""F6: find what fits a budget and judge whether accuracy holds. `python -m kvlab.search --budget-gb 6`.

settings   what was asked          space     budget-first configs      race      trials on growing item sets
sizing     what fits the minutes   engine    model to verdict          document  the result as plain data
"""
