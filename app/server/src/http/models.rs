//! The models that can be asked for.

use super::error::{ApiError, ErrorBody};
use super::{Shared, json};
use crate::fleet::ModelEntry;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{Response, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

/// A list of models.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    name: String,
}

fn model(entry: &ModelEntry) -> Model {
    Model {
        id: entry.id.clone(),
        object: "model",
        created: entry.created,
        owned_by: "local",
        name: entry.display_name.clone(),
    }
}

/// The models that can be asked for.
#[utoipa::path(
    get, path = "/v1/models", security(("bearer" = [])),
    responses((status = 200, body = ModelList), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody))
)]
pub(super) async fn list(State(service): State<Shared>) -> Response<Body> {
    let data = service.fleet.models().iter().map(model).collect();
    json(StatusCode::OK, &ModelList { object: "list", data })
}

/// One model.
#[utoipa::path(
    get, path = "/v1/models/{id}", security(("bearer" = [])), params(("id" = String, Path, description = "Its id")),
    responses((status = 200, body = Model), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody))
)]
pub(super) async fn one(State(service): State<Shared>, id: Result<Path<String>, PathRejection>) -> Response<Body> {
    // No model is called by what is no text.
    let Ok(Path(id)) = id else { return ApiError::not_found().into_response() };
    match service.fleet.find(&id) {
        Some(index) => json(StatusCode::OK, &model(&service.fleet.models()[index])),
        None => ApiError::model_not_found(&id).into_response(),
    }
}
