terraform {
  required_version = ">= 1.7" # 1.7 brought mock_provider, which the tests use

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 6.50, < 8"
    }
  }
}

provider "google" {
  project = var.project_id
}
