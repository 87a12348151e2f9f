"""Several PD clusters at one gateway: homes of requests, and their shares of PrfaaS clusters."""
