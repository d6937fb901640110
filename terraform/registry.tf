resource "google_artifact_registry_repository" "images" {
  # In the cluster's region: image streaming wants it near, and traffic inside a region is free.
  location      = local.region
  repository_id = var.cluster_name
  format        = "DOCKER"
  description   = "The course's images, built by Cloud Build"
  labels        = local.labels

  # An image is many gigabytes, paid for by the month: what is older than a month goes, but for the newest two.
  cleanup_policies {
    id     = "delete-old"
    action = "DELETE"
    condition {
      tag_state  = "ANY"
      older_than = "2592000s"
    }
  }
  cleanup_policies {
    id     = "keep-newest"
    action = "KEEP"
    most_recent_versions { keep_count = 2 }
  }

  depends_on = [google_project_service.api]
}

# An account of their own for the nodes: the default one may hold Editor on the whole project.
resource "google_service_account" "nodes" {
  account_id   = "${var.cluster_name}-nodes"
  display_name = "Nodes of ${var.cluster_name}"

  depends_on = [google_project_service.api]
}

resource "google_project_iam_member" "nodes" {
  project = var.project_id
  role    = "roles/container.defaultNodeServiceAccount"
  member  = "serviceAccount:${google_service_account.nodes.email}"
}

resource "google_artifact_registry_repository_iam_member" "nodes_read" {
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = "serviceAccount:${google_service_account.nodes.email}"
}

# In projects made since 2024, Cloud Build's default account need not have the right to build or push.
resource "google_service_account" "build" {
  account_id   = "${var.cluster_name}-build"
  display_name = "Image builds for ${var.cluster_name}"

  depends_on = [google_project_service.api]
}

resource "google_project_iam_member" "build" {
  project = var.project_id
  role    = "roles/cloudbuild.builds.builder"
  member  = "serviceAccount:${google_service_account.build.email}"
}
