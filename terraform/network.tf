locals {
  region = replace(var.zone, "/-[a-z]$/", "")
  labels = { course = "attention" } # what is billed for the course, in the billing report

  # The codelab's six, and: the image repository, its builds, and image streaming.
  apis = [
    "container", "compute", "iam", "cloudresourcemanager", "logging", "monitoring",
    "artifactregistry", "cloudbuild", "containerfilesystem",
  ]
}

resource "google_project_service" "api" {
  for_each = toset(local.apis)

  service = "${each.key}.googleapis.com"
  # The project may use the API for something else; enabled, it costs nothing.
  disable_on_destroy = false
}

resource "google_compute_network" "vpc" {
  name                    = var.cluster_name
  auto_create_subnetworks = false

  depends_on = [google_project_service.api]
}

resource "google_compute_subnetwork" "nodes" {
  name          = var.cluster_name
  network       = google_compute_network.vpc.id
  region        = local.region
  ip_cidr_range = "10.0.0.0/22"
  # Private nodes reach Artifact Registry and the other Google APIs without the NAT.
  private_ip_google_access = true

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.4.0.0/16" # a /24 a node: 256 nodes
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.8.0.0/20"
  }
}

resource "google_compute_router" "nat" {
  name    = var.cluster_name
  network = google_compute_network.vpc.id
  region  = local.region
}

# Nodes have no public address: the NAT is their way out to nvcr.io and PyPI.
resource "google_compute_router_nat" "nat" {
  name                               = var.cluster_name
  router                             = google_compute_router.nat.name
  region                             = local.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}
