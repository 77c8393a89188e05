//! The description of the interface, made from the handlers and the objects themselves.

use super::{Shared, generate, health, json, models};
use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "npuhal",
        description = "OpenAI-compatible interface to small language models on AMD Ryzen AI NPUs and on the CPU."
    ),
    paths(
        health::root, health::live, health::ready, health::metrics, models::list, models::one, generate::chat,
        generate::text, serve
    ),
    modifiers(&BearerKey)
)]
struct Description;

struct BearerKey;

impl Modify for BearerKey {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        document.components.get_or_insert_default().add_security_scheme("bearer", SecurityScheme::Http(scheme));
    }
}

/// The OpenAPI document that `/openapi.json` answers.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", responses((status = 200, body = Object)))]
pub(super) async fn serve(State(_): State<Shared>) -> Response<Body> {
    json(StatusCode::OK, &document())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::ENDPOINTS;
    use std::collections::BTreeSet;

    #[test]
    fn every_endpoint_is_described_under_the_name_it_is_counted_by() {
        let described: BTreeSet<String> = document().paths.paths.into_keys().collect();
        let counted: BTreeSet<String> = ENDPOINTS.iter().map(|(_, name)| (*name).to_owned()).collect();
        let mut expected = counted;
        expected.insert("/v1/models/{id}".to_owned());
        assert_eq!(described, expected);
    }
}
