"""A build's report as JUnit XML over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from farm.api.build_routes import BuildReference
from farm.api.gate import FarmDep, ReaderCaller
from farm.extras.ci.ci_formats import junit_xml

router = APIRouter(tags=["builds"])


@router.get("/builds/{build_id}/junit", response_class=Response, responses={200: {"content": {"application/xml": {}}}})
def junit(build_id: BuildReference, caller: ReaderCaller, farm: FarmDep, request: Request) -> Response:
    """Return a build's report as JUnit XML."""
    found = farm.build_reader.resolve(caller.namespace, build_id)
    link = f"{request.base_url}ui/ns/{caller.namespace}/builds/{found}"
    return Response(junit_xml(farm.build_reader.report(caller.namespace, found), link), media_type="application/xml")
