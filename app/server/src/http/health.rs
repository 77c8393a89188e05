//! What probes ask.

use super::error::ErrorBody;
use super::{Service, Shared, auth, json};
use crate::fleet::{FleetError, Health};
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use serde::Serialize;
use utoipa::ToSchema;

const SERVICE: &str = "npuhal";

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Root {
    service: &'static str,
    version: &'static str,
    status: &'static str,
    endpoints: Vec<&'static str>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Live {
    status: &'static str,
    service: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Ready {
    status: &'static str,
    /// Why it is not ready: `not_loaded`, `loading`, `load_failed`, `self_test_failed`, `draining`.
    reason: Option<&'static str>,
    draining: bool,
    #[serde(flatten)]
    details: Option<ReadyDetails>,
}

/// What is told to those who may use the models.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ReadyDetails {
    active_requests: usize,
    models: Vec<String>,
    resident: Vec<ResidentModel>,
    worker_restarts: u64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ResidentModel {
    model: String,
    route: String,
    device: String,
    context: usize,
}

fn why_not(service: &Service) -> Option<&'static str> {
    if service.admission.is_draining() {
        return Some("draining");
    }
    match service.fleet.health() {
        Health::Ready => None,
        Health::Empty => Some("not_loaded"),
        Health::Loading => Some("loading"),
        Health::Failed(FleetError::SelfTestFailed) => Some("self_test_failed"),
        Health::Failed(_) => Some("load_failed"),
    }
}

/// What this is, and what it answers.
#[utoipa::path(get, path = "/", responses((status = 200, body = Root)))]
pub(super) async fn root(State(service): State<Shared>) -> Response<Body> {
    let status = if why_not(&service).is_none() { "ready" } else { "not_ready" };
    let mut endpoints: Vec<&str> = super::ENDPOINTS.iter().map(|(path, _)| *path).collect();
    endpoints.retain(|path| *path != "/");
    json(StatusCode::OK, &Root { service: SERVICE, version: env!("CARGO_PKG_VERSION"), status, endpoints })
}

/// Whether the server runs. It says nothing about models.
#[utoipa::path(get, path = "/health", responses((status = 200, body = Live)))]
pub(super) async fn live() -> Response<Body> {
    json(StatusCode::OK, &Live { status: "ok", service: SERVICE })
}

/// Whether a model is loaded, has passed its self-test, and requests are taken. Without a key that is needed, no more than that.
#[utoipa::path(
    get, path = "/ready",
    responses((status = 200, body = Ready), (status = 503, body = Ready))
)]
pub(super) async fn ready(State(service): State<Shared>, headers: HeaderMap) -> Response<Body> {
    let reason = why_not(&service);
    let is_trusted = auth::refusal(&service, &headers).is_none();
    let body = Ready {
        status: if reason.is_none() { "ready" } else { "not_ready" },
        reason,
        draining: service.admission.is_draining(),
        details: is_trusted.then(|| details(&service)),
    };
    json(if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &body)
}

fn details(service: &Service) -> ReadyDetails {
    let residents = service.fleet.residents().into_iter();
    ReadyDetails {
        active_requests: service.admission.active(),
        models: service.fleet.models().iter().map(|model| model.id.clone()).collect(),
        resident: residents
            .map(|(model, resident)| ResidentModel {
                model,
                route: resident.route,
                device: resident.device,
                context: resident.context,
            })
            .collect(),
        worker_restarts: service.metrics.worker_restarts.get(),
    }
}

/// What the server counts, in OpenMetrics text.
#[utoipa::path(
    get, path = "/metrics", security(("bearer" = [])),
    responses(
        (status = 200, body = String, content_type = "application/openmetrics-text"),
        (status = 401, body = ErrorBody),
        (status = 403, body = ErrorBody)
    )
)]
pub(super) async fn metrics(State(service): State<Shared>) -> Response<Body> {
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    service.metrics.active.set(count(service.admission.active()));
    service.metrics.waiting.set(count(service.admission.waiting()));
    let mut response = Response::new(Body::from(service.metrics.text()));
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
