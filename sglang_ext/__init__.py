"""What deltaserve adds inside an SGLang worker, through SGLang's plugin interface."""
