"""What `import vitscale` offers: models, datasets, runs and recipes, and what is done with them.

The package `vitscale` imports each name when it is first used, so this module is empty.
"""
