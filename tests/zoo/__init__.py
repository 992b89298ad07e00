"""Model families of many kinds, each trained with and without a plan: see `zoo.table`."""
